"""The names of the two files of a submission, and their size limit."""

CODE = "train_gpt.py"
WEIGHTS = "final_model.specc"
LIMIT = 16_000_000  # bytes of both files together, by the rules of parameter-golf
