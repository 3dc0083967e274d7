"""The operations of the graph, one module per family.

Each operation has a type rule, a cost, a Torch expression and a float64 reference. Most operations have a derivative
rule.
"""
