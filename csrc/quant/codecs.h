// Every codec, for those that treat all formats alike: the kernels, and with_codec.h.
#pragma once

#include "quant/bf16-inl.h"
#include "quant/fp8-inl.h"
#include "quant/int4-inl.h"
#include "quant/int8-inl.h"
#include "quant/k4-inl.h"
#include "quant/mxfp4-inl.h"
