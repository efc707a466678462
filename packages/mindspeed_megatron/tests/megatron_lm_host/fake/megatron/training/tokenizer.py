"""The tokenizer."""


class NullTokenizer:
    def __init__(self, vocab_size):
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1


def build_tokenizer(args):
    tokenizer = NullTokenizer(args.vocab_size)
    if args.padded_vocab_size is None:
        args.padded_vocab_size = tokenizer.vocab_size
    return tokenizer
