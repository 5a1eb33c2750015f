"""The mapping tables of HunyuanVideo-1.5."""

from cogvideox_flax.conversion.hunyuan_video15.encoders import qwen_table, siglip_table
from cogvideox_flax.conversion.hunyuan_video15.transformer import transformer_table
from cogvideox_flax.conversion.hunyuan_video15.vae import vae_table
from cogvideox_flax.conversion.rules import Tables
from cogvideox_flax.conversion.t5 import t5_table

TABLES: Tables = {
    "text_encoder": qwen_table,
    "text_encoder_2": t5_table,
    "image_encoder": siglip_table,
    "transformer": transformer_table,
    "vae": vae_table,
}
