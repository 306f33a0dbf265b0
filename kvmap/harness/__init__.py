"""Evaluation through lm-eval: a transferred cache behind the interface of its Hugging Face models.

`adapter.py` holds the model that lm-eval knows as `kvmap`. What imports lm-eval does so late: nothing else in
kvmap waits for it.
"""
