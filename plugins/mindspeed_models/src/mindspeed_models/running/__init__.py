"""Steps from a published model, or from text alone, to a finetuned one: ``mindspeed-models run``."""
