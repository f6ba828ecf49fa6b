"""A model's parameters and buffers: on which stage each lies, and what stands for it elsewhere."""
