"""The two files of a submission."""

CODE = "train_gpt.py"
WEIGHTS = "final_model.specc"
LIMIT = 16_000_000  # bytes of both, as parameter-golf counts them
