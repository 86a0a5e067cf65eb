// Every codec, for those that treat all formats alike: the kernels, and with_codec.h.
#pragma once

#include "quant/bf16-inl.h"
#include "quant/fp8-inl.h"
#include "quant/int4-inl.h"
#include "quant/int8-inl.h"
#include "quant/k4-inl.h"
#include "quant/mxfp4-inl.h"

// Kernels, packing and the tables for other decoders are made of this list.
#define KTFT_EACH_CODEC(X) X(Bf16Codec) X(Int8Codec) X(Fp8Codec) X(K4Codec) X(Int4Codec) X(Mxfp4Codec)
