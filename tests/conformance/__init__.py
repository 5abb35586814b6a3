"""The tests that every method must pass, with the tiny models that they run on.

`pytest --pyargs kvcli.conformance -k NAME` runs them on one method, also on one that another package offers. They need
pytest (`pip install 'kvcli[test]'`).
"""
