"""Generation with trained models: settings, decoding, scoring and the loaded model that does them."""
