"""vLLM needs no line: its plug-in ranges prefill and decode steps, and the layers in its CUDA graphs by batch size.

    nvprof-kit profile -p graphs -- python examples/vllm_engine.py

Modules have ranges where vLLM does not compile them: mode 0 leaves the CUDA graphs as they are.
"""

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM("Qwen/Qwen3-0.6B", compilation_config={"mode": 0}, max_model_len=1024)
    for answer in llm.generate(["The layer that costs most is"] * 8, SamplingParams(max_tokens=16)):
        print(answer.outputs[0].text)
