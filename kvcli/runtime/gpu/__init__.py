"""Decoding over slots: a step whose phases overlap, without a decision on the host, and one CUDA graph (FreeKV, 4).

    lengths    how long the sequences of a batch are, and what follows from that
    streams      the streams that phases run on, and what waits for what
    layers     what one layer does at a step, as its plan says (`kvcli.methods.step`)
    recall     how missing pages come from host memory: read by a kernel, or copied through staging buffers
    pipeline   the attention handler of a whole batch, and the log that becomes its counters
    stepper    a step of the model around it, captured in a graph where that can be
    recorder   work captured in graphs, and how a capture that fails leaves all as it was
    piecewise  a step whose attention is its method's own, captured around it
    fused      what lies between the attention of two layers, in few kernels
    residual   decoder layers whose sum behind attention is made by the norm's kernel
    synthetic  speculation that is told what to find, for measurements on made-up weights

What a step attends to is what `kvcli.runtime.decode.BlockingPipeline` says: the same pages, the same tokens, the same
counts. On a CPU the kernels' references do the work and nothing overlaps.
"""
