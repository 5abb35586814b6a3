"""A decode step as a method states it, and the parts that steps are made of, over the slots of a batch.

    plan           what a step does: index, choice, when, what is fetched, feedback, correction
    batch_slots    a layer's caches of a batch, side by side in tensors whose shapes never change
    choices        which pages, tokens or chunks are attended to, by their scores
    page_bounds    the index of pages by bounds on their keys
    token_scores   what single tokens are scored by
    chunks         chunks by their mean keys, whose keys are rebuilt
    nucleus        tokens of chosen pages that hold a part of the attention
    eviction       where the newest token goes, and what attention gives back for the choice

Every part does its work by kernels, or by operations of torch that neither wait for the device nor copy anything to it,
so that a step may be captured in a CUDA graph. On a CPU the kernels' references do it.
"""
