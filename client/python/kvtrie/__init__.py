"""Python side of kvtrie, a store for KV caches of LLM inference.

kvtrie.calibrate makes a codec profile of a model. Nothing here needs a compiled extension.
"""
