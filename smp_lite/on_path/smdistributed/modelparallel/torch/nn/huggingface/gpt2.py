from smp_lite.smp_v1.missing import missing_in

__getattr__ = missing_in("nn.huggingface.gpt2", __name__)
