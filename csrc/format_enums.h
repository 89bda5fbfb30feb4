// SPDX-License-Identifier: MIT
// format_enums.h - the enumerations of the flat file's fields (format.h).
#ifndef LLAMAC_FORMAT_ENUMS_H
#define LLAMAC_FORMAT_ENUMS_H

enum norm { NORM_RMS = 1, NORM_LAYER };
enum position { POSITION_NONE = 1, POSITION_LEARNED, POSITION_ROPE };
enum activation {
    ACTIVATION_SILU = 1,
    ACTIVATION_GELU_TANH,
    ACTIVATION_GELU_ERF,
    ACTIVATION_RELU,
    ACTIVATION_QUICK_GELU,
    ACTIVATION_RELU2,
    ACTIVATION_XIELU
};
enum qk_norm { QK_NORM_NONE, QK_NORM_HEAD, QK_NORM_WHOLE, QK_NORM_LAYER_HEAD, QK_NORM_ROTATED_HEAD };
enum placement {
    PLACEMENT_PRE = 1,
    PLACEMENT_POST,
    PLACEMENT_SANDWICH,
    PLACEMENT_PARALLEL,
    PLACEMENT_NORMED,
    PLACEMENT_NORMED_ATTN
};
enum ffn { FFN_PLAIN = 1, FFN_GATED, FFN_EXPERTS, FFN_NONE };
enum mixer {
    MIXER_ATTENTION = 1,
    MIXER_DELTA_NET,
    MIXER_MAMBA2,
    MIXER_SHORT_CONV,
    MIXER_NONE,
    MIXER_ATTENTION_MAMBA2   // both, side by side
};
enum v_norm { V_NORM_NONE, V_NORM_HEAD };
enum output_gate { OUTPUT_GATE_NONE, OUTPUT_GATE_HEAD, OUTPUT_GATE_ELEMENT };
enum router { ROUTER_SOFTMAX, ROUTER_SIGMOID };
enum state_norm { STATE_NORM_NONE, STATE_NORM_BEFORE_GATE, STATE_NORM_AFTER_GATE };
enum drafter { DRAFTER_NONE, DRAFTER_ASSISTANT, DRAFTER_EAGLE3 };
// What an EAGLE-3 head norms before its first product: nothing, its three states together, or each of them.
enum eagle_in_norm { EAGLE_IN_NORM_NONE, EAGLE_IN_NORM_WHOLE, EAGLE_IN_NORM_EACH };
enum pooled_activation { POOLED_NONE, POOLED_TANH, POOLED_SIGMOID, POOLED_GELU_ERF, POOLED_RELU };
#endif
