"""Models of Hugging Face (hf): of transformers in, and runs out.

    HF_DIR/config.json          <- config ->     model.* of the YAML
                                   rotary        (its base, scaling, lengths and windows)
                                   fitting       (as which family a model goes out)
    HF_DIR/*.safetensors        <- names ->      a checkpoint of weights alone: step-00000000
                                   slices        (which part of our parameter one of their tensors is)
    HF_DIR/tokenizer.json, ...  <- sidecar ->    RUN/huggingface, data.tokenizer

Both directions read the same tables. Weights travel a parameter at a time, through the checkpoint's boxes.
"""
