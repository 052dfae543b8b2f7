"""Code that runs in the training process: ranges of layers, steps and phases, sent to NVTX or the embedded recorder.

`session` decides whether ranges are emitted and where they go, `ranges` is what runs at each range and follows the
backward pass; `annotate_model`, `layer_range` and the loop's functions are the user's API. Each room imports
only those before it: `patches`; `ranges` with `session` and `ranks`; `compile`; `modules`; `loop`;
`memory`, `flops`, `meters`. Only modules that use nn.Module or autograd import torch.
"""
