"""Shell: what a training script of bash would run, found out without running it (`threed convert`).

    text --tree-sitter--> tree --walk--> [Command, ...]     each with its words, as the program would get them

`words` expands words (variables, arrays, quotes, defaults), `sums` computes arithmetic and conditions,
`programs` knows the output of the few programs that scripts compute with (echo, cat, sed, bc ...), and `walk`
goes through the statements. Nothing is executed, and no file is written.

What cannot be known (a variable from outside, the output of a program) stays in a word as an *opaque* text:
the characters of what stands for it, such as $HOME, moved to a range of Unicode that no script uses. So it
can be joined, split and parsed again like any other text.
"""
