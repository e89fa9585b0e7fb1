"""What a user gives to be trained, how it is checked, and how its parts are executed.

`definition.py` has the public class `Experiment`, `loading.py` turns a name into one. The other
modules each execute one part: the loss, its precision, the optimizer's step, torch.compile.
"""
