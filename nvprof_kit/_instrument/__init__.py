"""Code that runs in the training process: ranges of layers, steps and phases, sent to NVTX or the embedded recorder.

`state` decides whether ranges are emitted, `backends` where they go; `layer_range`, `annotate` and `loop` are the user
API; `frames` follows the backward pass through the layers. Only modules that use nn.Module or autograd import torch.
"""
