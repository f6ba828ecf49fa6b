from .common.train import train

train.dist.pipeline_parallel_size = 4
train.dist.pipeline_num_layers = 24
train.dist.custom_pipeline_stage_id = [0] * 6 + [1] * 7 + [2] * 7 + [3] * 4
train.train_micro_batch_size = 8
train.global_batch_size = 128
