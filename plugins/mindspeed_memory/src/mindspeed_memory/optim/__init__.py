"""The block-wise AdamW and the forms and places of what it keeps."""
