"""Text in, token windows out.

    source --corpus--> documents --tokenizer--> ids --tokens--> prefix.bin + prefix.idx --samples--> window i

A *document* is one text: a file, or a line of JSONL. The *stream* is the tokens of all documents, one after
the other. A *window* is `seq_len` tokens of the stream and the one that follows them.
"""
