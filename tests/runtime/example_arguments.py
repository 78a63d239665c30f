"""Arguments for each class of examples/, as one writes them on the command line."""

from __future__ import annotations

EXAMPLES = {
    "add_rms_norm.py:AddRMSNorm": ["bf16[8,16]", "bf16[8,16]", "bf16[16]", "1e-6"],
    "cross_entropy.py:CrossEntropy": ["f32[8,16]", "i64[8]", "-100", "0.1", "1e-4"],
    "cube.py:Cube": ["f64[8]"],
    "focal_loss.py:FocalLoss": ["f32[8]", "bool[8]", "0.25", "2.0"],
    "layer_norm.py:LayerNorm": ["bf16[8,16]", "bf16[16]", "bf16[16]", "1e-5"],
    "learned_step.py:LearnedStep": ["f32[8,16]", "f32[]", "3"],
    "linear_sgd.py:FunctionalLinear": ["f32[8,16]", "f32[4,16]", "None"],
    "masked_softmax.py:MaskedSoftmax": ["f32[2,8,8]", "bool[8,8]"],
    "poisson.py:Swish": ["f32[8,16]"],
    "relu.py:ReLU": ["f16[8,16]"],
    "rope.py:RoPE": ["bf16[2,4,8,16]", "bf16[8,8]", "bf16[8,8]"],
    "selective_scan.py:SelectiveScan": ["f32[2,12,4]", "f32[2,12,4]", "f32[4,3]", "f32[2,12,3]", "f32[2,12,3]"],
    "spiking.py:LeakyFire": ["f32[12,4,8]", "0.9", "1.0"],
    "straight_through.py:Quantize": ["f32[8,16]", "0.25", "4"],
    "swiglu.py:SwiGLU": ["bf16[8,16]", "bf16[8,16]"],
}
