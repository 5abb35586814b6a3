"""The conformance suite over all methods of the listing."""

from kvcli.conformance.test_method import *  # noqa: F403
