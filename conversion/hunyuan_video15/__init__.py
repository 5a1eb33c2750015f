"""The mapping tables of HunyuanVideo-1.5, and the names of its transformer in files of other layouts."""

from cogvideox_flax.conversion.hunyuan_video15.encoders import qwen_table, siglip_table
from cogvideox_flax.conversion.hunyuan_video15.transformer import OTHER_NAMES, transformer_table
from cogvideox_flax.conversion.hunyuan_video15.vae import vae_table
from cogvideox_flax.conversion.renamed import Naming
from cogvideox_flax.conversion.rules import Tables
from cogvideox_flax.conversion.t5 import t5_table
from cogvideox_flax.models.hunyuan_video15.adapters import LORA

TABLES: Tables = {
    "text_encoder": qwen_table,
    "text_encoder_2": t5_table,
    "image_encoder": siglip_table,
    "transformer": transformer_table,
    "vae": vae_table,
}

NAMINGS = {"transformer": Naming(OTHER_NAMES, LORA.swapped)}
