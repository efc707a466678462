"""Verdicts on the flags of the programs that launch scripts were written for.

A flag of Megatron-LM, MindSpeed or MindSpeed-LLM is *used* where somebody here declares it. Of the others
each is *noted* (it changes nothing here), *translated* (the same thing is spelled otherwise) or *refused*
(without it a run would train, save or read something else). The tables are data, read by every host, by
command lines and configuration dictionaries alike, and by the pages of the documentation. Torch-free.
"""
