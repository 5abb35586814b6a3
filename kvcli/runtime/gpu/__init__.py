"""Decoding over slots: overlapping phases in one CUDA graph, without decisions on the host (FreeKV, section 4).

    layers     one layer's work in a step, as its plan says (`kvcli.methods.step`); lengths; the log
    recall     fetching missing pages from host memory: read by a kernel, or copied through staging buffers
    pipeline   the attention handler of a whole batch; layers fetched whole; synthetic decisions for measurements
    stepper    a step of the model around it, captured in a graph if possible
    recorder   streams, graphs, and recovery from a failed capture
    piecewise  a step whose attention is its method's own, captured around it
    fused      the work between the attention of two layers, in few kernels

A step attends to what `kvcli.runtime.decode.BlockingPipeline` defines: the same pages, tokens and counts. On a CPU the
kernels' references do the work and nothing overlaps.
"""
