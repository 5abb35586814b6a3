"""Decoding over slots: a step whose phases overlap, without a decision on the host, and one CUDA graph (FreeKV, 4).

    slots      a batch's caches, side by side in tensors whose shapes never change
    streams      the streams that phases run on, and what waits for what
    layers     what one layer does at a step: attend; or speculate, correct, recall
    recall     how missing pages come from host memory: read by a kernel, or copied through staging buffers
    pipeline   the attention handler of a whole batch, and the log that becomes its counters
    stepper    a step of the model around it, captured in a graph where that can be
    compiled   what lies between the attention of two layers, through torch.compile
    forced     speculation that is told what to find, for measurements on made-up weights

What a step attends to is what `kvcli.runtime.decode.BlockingPipeline` says: the same pages, the same tokens, the same
counts. On a CPU the kernels' references do the work and nothing overlaps.
"""
