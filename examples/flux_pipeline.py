"""A tiny FLUX makes an image: its text encoders, each denoising step, and its VAE are ranged."""

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from nvprof_kit.integrations.diffusers import annotate_pipeline

clip = CLIPTextConfig(vocab_size=99, hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4)
t5 = T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
blocks = dict(num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2, axes_dims_rope=[4, 4, 8])
transformer = FluxTransformer2DModel(in_channels=4, joint_attention_dim=32, pooled_projection_dim=32, **blocks)
vae = AutoencoderKL(latent_channels=1, block_out_channels=(4,), norm_num_groups=1, use_quant_conv=False)
vae.register_to_config(shift_factor=0.0609, scaling_factor=1.5035)
parts = dict(text_encoder=CLIPTextModel(clip), text_encoder_2=T5EncoderModel(t5), transformer=transformer, vae=vae)
pipe = FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), tokenizer=None, tokenizer_2=None, **parts)
pipe.to("cuda" if torch.cuda.is_available() else "cpu").set_progress_bar_config(disable=True)

annotate_pipeline(pipe)  # all that FLUX needs; before an embedded recording or under nsys, and free otherwise
words = torch.randint(1, 90, (1, 8), device=pipe.device)  # in place of the two tokenizers, which come with weights
prompt = pipe.text_encoder_2(words)[0], pipe.text_encoder(words).pooler_output
options = dict(height=8, width=8, num_inference_steps=4, guidance_scale=0.0)
image = pipe(prompt_embeds=prompt[0], pooled_prompt_embeds=prompt[1], output_type="pt", **options).images
print("image", tuple(image.shape))
