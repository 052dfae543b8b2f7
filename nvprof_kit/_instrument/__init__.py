"""Inside the training process: ranges of layers, steps and phases, to NVTX under a tool or to the embedded recorder.

`backends` and `state` say where ranges go and whether; `layer_range`, `annotate` and `loop` are what a user calls;
`frames` leads the backward pass through the layers. Only what touches modules or autograd imports torch.
"""
