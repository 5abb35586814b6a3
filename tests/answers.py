"""A prediction for tests to vary."""

from kvcli.quality.eval.predictions import Prediction

ONE = Prediction(
    task="vt",
    length=700,
    depth=None,
    index=0,
    variant="full",
    sample=0,
    text="x",
    score=1.0,
    finish_reason="eos",
    prompt_tokens=690,
    cut_tokens=0,
    output_tokens=5,
    nll=None,
    prefill_ms=1.0,
    decode_ms=12.0,
    steps=4,
    attended=100.0,
    attended_share=0.5,
    device_kv_bytes=1000,
    host_kv_bytes=0,
    bytes_to_device=80,
    heads_checked=6,
    heads_corrected=3,
    pages_requested=10,
    misses=4,
)
