"""Megatron-LM's pretrain_gpt.py with its layers, steps and evaluations ranged; the arguments are its own.

    nvprof-kit ranks profile -- torchrun --nproc-per-node 8 examples/megatron_pretrain.py ARGUMENTS

Run it from Megatron-LM's folder. With Megatron-Bridge: pretrain(config, forward_step, callbacks=[LayerCallback()]).
"""

import runpy

from nvprof_kit.integrations.megatron import annotate_training

if __name__ == "__main__":
    annotate_training()
    runpy.run_path("pretrain_gpt.py", run_name="__main__")
