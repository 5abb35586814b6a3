"""Numerical kernels, one file each: the maths and shapes, then the code.

Where there is a Triton kernel, the reference in torch stands before it and the function that chooses between them after
it. Functions that end in `_device`, or take `PagedKV` or a `Decision`, serve a batch inside a CUDA graph: shapes are
fixed, lengths and page tables are tensors, and predicates (`heads`, a length, a list's length) are read on the device.
A step of a layer that selects pages is made of them, in the order of its data:

    correct_heads             q, previous, lengths                -> decision
    page_scores_device        q, summary, lengths                 -> scores
    topk_pages_device         scores, lengths                     -> selected
    resolve_pages_device      resident, selected, decision.now    -> misses, resident
    gather_pages              host, misses                        -> rows
    slot_attention            q, rows, resident, new token        -> out, rows
    summarise_filled_page     rows, lengths                       -> summary
    write_filled_page         rows, lengths                       -> host
    resolve_pages_device      resident, selected, decision.later  -> misses, resident
    gather_pages              host, misses                        -> rows

Attention of the heads that do not wait may run before or beside the first recall (`heads` of `slot_attention`). Four
orders have to be kept where streams are forked: a head attends after the resolution and the gather that are for it, and
before those that come next; the last resolution and gather follow attention; a page is summarised and written out after
the append and before its slot is filled anew; a page is selected only after it was written out.
"""
