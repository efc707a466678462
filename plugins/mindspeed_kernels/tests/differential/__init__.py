"""Random calls of every public operator, each with a formula of its own in float64.

A generator makes a `case.Case` from `draws.Draws`; `judge.judge` calls the operator and compares values,
gradients and changed arguments with the formula. No formula uses code of the package. To cover a new
operator, decorate a function with `case.generates`, or with `case.generates_worlds` where ranks communicate,
in the module of its kind.
"""
