"""A small streaming speech recogniser trained on recorded speech, end to end.

    sources    bytes of packages, folders and audio files
    data       corpora -> utterances (samples, text), split into training and held-out
    features   samples -> log-mel frames
    batches    utterances -> padded batches in a reproducible order
    model      features, labels -> loss        (the loss: rnnt.RNNTJointLoss)
    decode     audio, piece by piece -> text
    metrics    text, reference -> error rates
    ranks      the processes of a run under torchrun
    gradients  batch -> gradients, summed over processes; or "does not fit in memory"
    trainer    steps, schedule, evaluation
    checkpoint what a run needs to continue, in a file
    report     loss curve, alignment picture, sample sentences

Commands: `python -m examples.speech.fetch`, `.train` (also under torchrun) and `.decode`.
"""
