"""Test-time adaptation: methods by which a model adapts to the text that it scores.

Each module implements the methods of one kind of `eval.adapt`.
"""
