"""Models in Hugging Face's layout: their names, their configuration and the safetensors files that hold them."""
