"""Supervised fine-tuning by TRL, whose trainers take the callback of Hugging Face's Trainer."""

import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from nvprof_kit.integrations.huggingface import LayerCallback  # (1)

words = Tokenizer(models.WordLevel({str(number): number for number in range(100)}, unk_token="0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="99", pad_token="98")
size = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **size))
data = Dataset.from_dict({"text": [" ".join(map(str, range(start, start + 32))) for start in range(16)]})
with tempfile.TemporaryDirectory() as folder:
    options = dict(per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3, report_to=[])
    config = SFTConfig(folder, **options, save_strategy="no", disable_tqdm=True, bf16=False)
    parts = dict(train_dataset=data, processing_class=tokenizer)
    SFTTrainer(model, config, **parts, callbacks=[LayerCallback()]).train()  # (2)
