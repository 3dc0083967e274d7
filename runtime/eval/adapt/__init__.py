"""Test-time adaptation: methods by which a model adapts to the text that it scores. One file per kind of
`eval.adapt`.
"""
