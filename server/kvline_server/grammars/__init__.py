"""Grammars: what an answer must follow, and the tokens that may come next.

HTTP. `asked.asked` makes a Grammar of a request, or raises GrammarInvalid with the field. Before
admission, and until the last of the request's sequences has ended:

    with await compiler.compiled(grammar) as key:  # NotServed: a 400; NotNow: a 503
        ...  # key goes to the engine with each sequence

Engine. `matchers.attach` once, before it serves. For each sequence with a key `begin`, and `end`
whatever ends it; a preempted one goes on. In a step, for the rows that are to be sampled:

    matchers.ask([Wanted(sequence, new tokens, drafts, row), ...])  # 1 + len(drafts) rows each
    ...  # launch what does not depend on masks
    masks = matchers.wait()

Rows are numbered from 0 without gaps, in the order of the step's sampled rows, so that
`TokenMasks(rows, matchers.table[:n].reshape(-1))` of worker/step.py copies nothing; they hold until
the next `ask`. New tokens are all that the sequence gained since it was asked for last, an end
token too. A sequence in `masks.failed` ends with that reason, its row allows everything; one in
`masks.finished` has nothing left but to stop. Neither needs a mask.
"""
