"""Evaluation items and validation documents that are also in the training documents.

Words: a text is brought to Unicode form NFKC and lower case. Punctuation and white space only separate words.

An item counts as
- exact if its whole question is in one training document, which may have another answer. Of a question that is built
  from several fields, such as a passage and a question about it, all must be there. A question of fewer than 8 words
  counts only if it is a whole turn or field of the document and the expected answer is in the document too;
- overlapping if it is not exact, but 13 consecutive words of its question, choices or expected answer are in a training
  document. The share of its 13-grams that were found is reported too;
- shared_passage if the only such words are in the longest field of a question of several fields, so that another
  question about the same passage may have been trained on;
- clean otherwise.

Common text is ignored, because it would mark everything: a 13-gram in more than 10 items of one task (or, in a task of
fewer than 20 items, in more than half of them), such as an instruction or a template, and one in more than 10 training
documents that are also more than 1% of them, such as a licence. Exact items are found whatever is ignored. Documents
are read whole, so text after `training.max_length` counts too.

Sources: 13-grams, lower case without punctuation, at least 8 words for shorter items, and the 10 documents above which
a 13-gram is ignored: "Language Models are Few-Shot Learners" (GPT-3, arXiv 2005.14165), appendix C. There a single
13-gram marks an item. "Tulu 3" (arXiv 2411.15124), section 3.2, counts an item if more than half of its tokens are in
matching 8-grams: compare `num_half`, the overlapping items with at least half of their 13-grams found.
"""
