"""The operations of the graph, one module per family.

Each operation has a type rule, a cost, a Torch expression, a float64 reference and, optionally, a derivative rule.
"""
