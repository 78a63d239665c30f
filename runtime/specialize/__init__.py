"""One kind of call: the pipeline, the specialization that it makes, residuals, its traced backward.

Begin with `pipeline.specialize`: the whole compiler, one step after the other.
"""
