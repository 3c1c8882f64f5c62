"""Text and token ids: all that the processes need of a tokenizer, without torch.

vocabulary   what each token id stands for, in bytes
detokenize   ids to text, piece by piece
stops        stop strings in text that arrives in pieces
chat         chat templates
tokenize     text to ids, on threads
"""
