"""One class, one kind of call: the pipeline, the table of specializations, residuals, backward.

Begin with `pipeline.specialize`: the whole compiler, one step after the other.
"""
