"""SGLang needs no line: its plug-in ranges prefill and decode steps, and the layers in its CUDA graphs by batch size.

nvprof-kit profile -p graphs -- python examples/sglang_engine.py
"""

import sglang

if __name__ == "__main__":
    engine = sglang.Engine(model_path="Qwen/Qwen3-0.6B")
    for answer in engine.generate(["The layer that costs most is"] * 8, {"max_new_tokens": 16}):
        print(answer["text"])
    engine.shutdown()
