"""Hosts: default implementations of the stages. Others register in the group ``mindspeed.hosts``."""
