"""Engine rules: which engine takes a checkpoint, refuses it, misreads it, or runs it slowly.

The rows lie in one module per engine, as data with the version they were read from. ``rules`` applies them to
``ModelFacts``; nothing here reads a file.
"""
