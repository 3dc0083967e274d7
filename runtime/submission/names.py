"""The names of the two files in a submission, and the limit of their total size."""

CODE = "train_gpt.py"
WEIGHTS = "final_model.specc"
LIMIT = 16_000_000  # the limit for both files together, in bytes, by the rules of parameter-golf
