"""Text in, token windows out.

    source --corpus--> documents --tokenizer--> ids --tokens--> prefix.bin + prefix.idx --samples--> window i

A *document* is one text: a file, or a line of JSONL. The *stream* is the tokens of all documents, one after
the other. A *window* is `seq_len` inputs, and the token that follows each: a piece of the stream, or whole
documents (packing). A *mixture* takes windows of several sources in turn (mix).
"""
