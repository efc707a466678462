"""Muon: momentum that is orthogonalized, matrix by matrix.

``options`` is what the flags say, ``newton_schulz`` the iteration, ``matrices`` what of a model it is applied
to, ``exchange`` how shards of a matrix meet, ``tensor_parallel`` what ranks that share a matrix do, and
``rule`` the update. Source: https://kellerjordan.github.io/posts/muon/, in the form of megatron-core's.
"""
