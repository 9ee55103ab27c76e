"""
The C++ half of tiny_vllm. Private: use what the package tiny_vllm exports.
"""
from __future__ import annotations
import collections.abc
import numpy
import numpy.typing
import typing
__all__: list[str] = ['BlockAllocator', 'Checkpoint', 'CudaDevice', 'DeviceArray', 'Engine', 'EngineOptions', 'KernelRecord', 'ModelConfig', 'Ops', 'OpsBatch', 'Request', 'Rope', 'SafetensorsFile', 'SampleRow', 'SamplingParams', 'ScheduledChunk', 'Scheduler', 'StepOutput', 'StepPlan', 'TensorEntry', 'TokenLogprob', 'available_isas', 'build_info', 'cuda_devices', 'measure_read_bandwidth', 'parse_config', 'sample', 'supported_model_types']
class CudaDevice:
    """
    A GPU that the CUDA driver shows.
    """
    @property
    def compute_capability(self) -> int:
        """
        90 for 9.0
        """
    @property
    def index(self) -> int:
        ...
    @property
    def memory_bytes(self) -> int:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def num_multiprocessors(self) -> int:
        ...
class DeviceArray:
    """
    A tensor on a device.
    """
    def numpy(self) -> numpy.ndarray:
        """
        A copy: float32, or uint16 with the bits of bfloat16.
        """
    def view(self, first: typing.SupportsInt | typing.SupportsIndex, shape: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> DeviceArray:
        """
        A part of it in another shape, not copied.
        """
    @property
    def dtype(self) -> str:
        ...
    @property
    def shape(self) -> list[int]:
        ...
class OpsBatch:
    """
    The part of a step's batch that rope_and_cache and paged_attention read.
    """
    def __init__(self, *, query_start: typing.Annotated[numpy.typing.ArrayLike, numpy.int32], context_len: typing.Annotated[numpy.typing.ArrayLike, numpy.int32], block_tables: typing.Annotated[numpy.typing.ArrayLike, numpy.int32], slot_mapping: typing.Annotated[numpy.typing.ArrayLike, numpy.int64], cos_sin: typing.Annotated[numpy.typing.ArrayLike, numpy.float32], num_heads: typing.SupportsInt | typing.SupportsIndex, num_kv_heads: typing.SupportsInt | typing.SupportsIndex, head_dim: typing.SupportsInt | typing.SupportsIndex, block_size: typing.SupportsInt | typing.SupportsIndex, sliding_window: typing.SupportsInt | typing.SupportsIndex = 0, scale: typing.SupportsFloat | typing.SupportsIndex = 0.0) -> None:
        ...
class Ops:
    """
    The ops of one device. See tiny_vllm.ops, which wraps it.
    """
    def __init__(self, device: str = 'cpu', num_threads: typing.SupportsInt | typing.SupportsIndex = 0, cpu_isa: str = 'auto') -> None:
        ...
    def act_mul(self, gate_up: DeviceArray, activation: str, out: DeviceArray) -> None:
        ...
    def array(self, data: numpy.ndarray) -> DeviceArray:
        ...
    def copy_block(self, keys: DeviceArray, values: DeviceArray, src: typing.SupportsInt | typing.SupportsIndex, dst: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    def empty(self, shape: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], dtype: str) -> DeviceArray:
        ...
    def gather_rows(self, x: DeviceArray, rows: typing.Annotated[numpy.typing.ArrayLike, numpy.int32], out: DeviceArray) -> None:
        ...
    def matmul(self, x: DeviceArray, weight: DeviceArray, bias: DeviceArray | None, out: DeviceArray) -> None:
        ...
    def matmul_add(self, x: DeviceArray, weight: DeviceArray, bias: DeviceArray | None, out: DeviceArray) -> None:
        ...
    def norm_matmul(self, x: DeviceArray, norm_weight: DeviceArray, eps: typing.SupportsFloat | typing.SupportsIndex, room: DeviceArray, weight: DeviceArray, bias: DeviceArray | None, out: DeviceArray) -> None:
        ...
    def norm_matmul_act_mul(self, x: DeviceArray, norm_weight: DeviceArray, eps: typing.SupportsFloat | typing.SupportsIndex, room: DeviceArray, weight: DeviceArray, bias: DeviceArray | None, activation: str, gate_up: DeviceArray, out: DeviceArray) -> None:
        ...
    def paged_attention(self, qkv: DeviceArray, batch: OpsBatch, keys: DeviceArray, values: DeviceArray, out: DeviceArray) -> None:
        ...
    def rms_norm(self, x: DeviceArray, weight: DeviceArray, eps: typing.SupportsFloat | typing.SupportsIndex, out: DeviceArray) -> None:
        ...
    def rope_and_cache(self, qkv: DeviceArray, q_norm: DeviceArray | None, k_norm: DeviceArray | None, eps: typing.SupportsFloat | typing.SupportsIndex, batch: OpsBatch, keys: DeviceArray, values: DeviceArray) -> None:
        ...
    @property
    def description(self) -> str:
        ...
class SampleRow:
    """
    How a row of logits becomes a token.
    """
    def __init__(self, temperature: typing.SupportsFloat | typing.SupportsIndex, top_k: typing.SupportsInt | typing.SupportsIndex, top_p: typing.SupportsFloat | typing.SupportsIndex, min_p: typing.SupportsFloat | typing.SupportsIndex, seed: typing.SupportsInt | typing.SupportsIndex, position: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
class BlockAllocator:
    """
    The pages of the KV cache: free, cached or owned. A block table is a list of ints.

    Raises InternalError when it is used wrongly: a block released twice, an unknown block.
    """
    def __init__(self, num_blocks: typing.SupportsInt | typing.SupportsIndex, block_size: typing.SupportsInt | typing.SupportsIndex, enable_prefix_caching: bool = True, *, constant_hash: typing.SupportsInt | typing.SupportsIndex | None = None) -> None:
        """
        constant_hash: gives all blocks the same hash, for tests.
        """
    def allocate(self, count: typing.SupportsInt | typing.SupportsIndex) -> list[int] | None:
        """
        A list of blocks, or None when there are fewer than `count`.
        """
    def check_invariants(self) -> None:
        """
        Raises InternalError when the books do not balance.
        """
    def find_prefix(self, tokens: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], salt: typing.SupportsInt | typing.SupportsIndex = 0, max_tokens: typing.SupportsInt | typing.SupportsIndex | None = None, known: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] = []) -> list[int]:
        ...
    def is_writable(self, block: typing.SupportsInt | typing.SupportsIndex) -> bool:
        ...
    def make_writable(self, block_table: list, i: typing.SupportsInt | typing.SupportsIndex) -> tuple[int, int] | None:
        """
        Changes block_table[i] if it must be copied: (source, destination).
        """
    def ref_count(self, block: typing.SupportsInt | typing.SupportsIndex) -> int:
        ...
    def register_blocks(self, block_table: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], tokens: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], salt: typing.SupportsInt | typing.SupportsIndex = 0, begin: typing.SupportsInt | typing.SupportsIndex = 0, end: typing.SupportsInt | typing.SupportsIndex | None = None) -> None:
        ...
    def release(self, block_table: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> None:
        ...
    def share(self, blocks: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> None:
        ...
    @property
    def block_size(self) -> int:
        ...
    @property
    def cached_blocks(self) -> int:
        ...
    @property
    def free_blocks(self) -> int:
        """
        Those that allocate() can hand out.
        """
    @property
    def num_blocks(self) -> int:
        ...
    @property
    def owned_blocks(self) -> int:
        ...
    @property
    def stats(self) -> dict:
        ...
class Request:
    """
    One sequence of tokens on its way through a Scheduler.
    """
    def __init__(self, id: str, prompt: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], max_tokens: typing.SupportsInt | typing.SupportsIndex, *, n: typing.SupportsInt | typing.SupportsIndex = 1, arrival: typing.SupportsInt | typing.SupportsIndex = 0, read_prefix_cache: bool = True, cache_salt: typing.SupportsInt | typing.SupportsIndex = 0, priority: typing.SupportsInt | typing.SupportsIndex = 0) -> None:
        ...
    def __repr__(self) -> str:
        ...
    def append(self, token: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        The token that the model has chosen.
        """
    @property
    def arrival(self) -> int:
        ...
    @property
    def block_table(self) -> list[int]:
        ...
    @property
    def cache_salt(self) -> int:
        ...
    @property
    def id(self) -> str:
        ...
    @property
    def index(self) -> int:
        ...
    @property
    def max_total_tokens(self) -> int:
        ...
    @property
    def n(self) -> int:
        ...
    @property
    def num_cached_tokens(self) -> int:
        ...
    @property
    def num_computed_tokens(self) -> int:
        ...
    @property
    def num_output_tokens(self) -> int:
        ...
    @property
    def num_preemptions(self) -> int:
        ...
    @property
    def num_prompt_tokens(self) -> int:
        ...
    @property
    def num_tokens(self) -> int:
        ...
    @property
    def priority(self) -> int:
        ...
    @property
    def state(self) -> str:
        ...
    @property
    def tokens(self) -> list[int]:
        ...
class ScheduledChunk:
    """
    Positions [start, start + count) of a request.
    """
    @property
    def count(self) -> int:
        ...
    @property
    def request(self) -> Request:
        ...
    @property
    def start(self) -> int:
        ...
class StepPlan:
    """
    What one step computes, and the block copies (source, destination) before it.
    """
    @property
    def admitted(self) -> list[Request]:
        ...
    @property
    def chunks(self) -> list[ScheduledChunk]:
        ...
    @property
    def copies(self) -> list[tuple[int, int]]:
        ...
    @property
    def num_tokens(self) -> int:
        ...
    @property
    def preempted(self) -> list[Request]:
        ...
class Scheduler:
    """
    Decides, step by step, which tokens are computed next.

    The loop: plan = schedule(); compute plan.chunks; commit(plan); append() a token to each request whose chunk reached its end; remove() the finished ones.

    Raises InvalidRequestError for an impossible configuration or request, with the numbers.
    """
    def __init__(self, policy: str, allocator: BlockAllocator, *, max_num_seqs: typing.SupportsInt | typing.SupportsIndex, max_num_batched_tokens: typing.SupportsInt | typing.SupportsIndex, max_model_len: typing.SupportsInt | typing.SupportsIndex, enable_chunked_prefill: bool = True) -> None:
        """
        policy: "continuous" or "static".
        """
    def add(self, request: Request) -> None:
        ...
    def check_invariants(self) -> None:
        """
        Raises InternalError when the books do not balance.
        """
    def commit(self, plan: StepPlan) -> None:
        ...
    def fork(self, parent: Request, index: typing.SupportsInt | typing.SupportsIndex) -> Request:
        """
        A copy of `parent` that shares its blocks and runs on its own.
        """
    def has_unfinished(self) -> bool:
        ...
    def remove(self, request: Request) -> None:
        ...
    def schedule(self) -> StepPlan:
        ...
    @property
    def max_total_len(self) -> int:
        ...
    @property
    def running(self) -> list[Request]:
        ...
    @property
    def waiting(self) -> list[Request]:
        ...
class TensorEntry:
    """
    What a checkpoint says of one tensor.
    """
    @property
    def dtype(self) -> str:
        ...
    @property
    def file(self) -> str:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def nbytes(self) -> int:
        ...
    @property
    def shape(self) -> tuple:
        ...
    @property
    def supported(self) -> bool:
        ...
class SafetensorsFile:
    """
    One safetensors file, checked and mapped.
    """
    def __contains__(self, arg0: str) -> bool:
        ...
    def __init__(self, path: str) -> None:
        """
        Raises ModelLoadError naming the file, and the tensor where there is one.
        """
    def bytes(self, name: str) -> bytes:
        """
        The bytes of a tensor as they are in the file. Raises KeyError.
        """
    def numpy(self, name: str, dtype: str = 'float32') -> numpy.ndarray:
        """
        A copy of a tensor: dtype 'float32', or 'bfloat16' as its bits in uint16. Raises KeyError, ModelLoadError.
        """
    def tensor(self, name: str) -> TensorEntry:
        """
        The entry of a tensor. Raises KeyError.
        """
    @property
    def names(self) -> list[str]:
        ...
class Checkpoint:
    """
    The weights of a model folder: one file, or shards and an index.
    """
    def __contains__(self, arg0: str) -> bool:
        ...
    def __init__(self, folder: str) -> None:
        """
        Raises ModelLoadError naming the file, and the tensor where there is one.
        """
    def bytes(self, name: str) -> bytes:
        """
        The bytes of a tensor as they are in the file. Raises KeyError.
        """
    def numpy(self, name: str, dtype: str = 'float32') -> numpy.ndarray:
        """
        A copy of a tensor: dtype 'float32', or 'bfloat16' as its bits in uint16. Raises KeyError, ModelLoadError.
        """
    def tensor(self, name: str) -> TensorEntry:
        """
        The entry of a tensor. Raises KeyError.
        """
    @property
    def files(self) -> list[str]:
        ...
    @property
    def names(self) -> list[str]:
        ...
    @property
    def nbytes(self) -> int:
        ...
    @property
    def notes(self) -> list[str]:
        ...
class ModelConfig:
    """
    config.json, checked: what the forward pass needs to know about a model.
    """
    def __getitem__(self, arg0: str) -> typing.Any:
        ...
    def __repr__(self) -> str:
        ...
    def as_dict(self) -> dict:
        """
        Every field, by name.
        """
    @property
    def head_dim(self) -> int:
        ...
    @property
    def hidden_size(self) -> int:
        ...
    @property
    def intermediate_size(self) -> int:
        ...
    @property
    def max_position_embeddings(self) -> int:
        ...
    @property
    def model_type(self) -> str:
        ...
    @property
    def num_heads(self) -> int:
        ...
    @property
    def num_kv_heads(self) -> int:
        ...
    @property
    def num_layers(self) -> int:
        ...
    @property
    def vocab_size(self) -> int:
        ...
class Rope:
    """
    Rotary angles of a model. Frequencies are in radians a token.
    """
    def __init__(self, config: ModelConfig) -> None:
        ...
    def cos_sin(self, position: typing.SupportsInt | typing.SupportsIndex, sequence_length: typing.SupportsInt | typing.SupportsIndex = 0) -> numpy.typing.NDArray[numpy.float32]:
        """
        (Dh/2, 2): cos and sin of each pair at a position.
        """
    def inv_freq(self, sequence_length: typing.SupportsInt | typing.SupportsIndex = 0) -> numpy.typing.NDArray[numpy.float32]:
        """
        (Dh/2) frequencies; the length matters to dynamic scaling only.
        """
    @property
    def attention_scaling(self) -> float:
        ...
    @property
    def depends_on_length(self) -> bool:
        ...
class SamplingParams:
    """
    See tiny_vllm.SamplingParams.
    """
    ignore_eos: bool
    def __init__(self) -> None:
        ...
    def validate(self, vocab_size: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def allowed_token_ids(self) -> list[int]:
        ...
    @allowed_token_ids.setter
    def allowed_token_ids(self, arg0: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> None:
        ...
    @property
    def bad_words(self) -> list[list[int]]:
        ...
    @bad_words.setter
    def bad_words(self, arg0: collections.abc.Sequence[collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]]) -> None:
        ...
    @property
    def frequency_penalty(self) -> float:
        ...
    @frequency_penalty.setter
    def frequency_penalty(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None:
        ...
    @property
    def logit_bias(self) -> list[tuple[int, float]]:
        ...
    @logit_bias.setter
    def logit_bias(self, arg0: collections.abc.Sequence[tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsFloat | typing.SupportsIndex]]) -> None:
        ...
    @property
    def logprobs(self) -> int | None:
        ...
    @logprobs.setter
    def logprobs(self, arg0: typing.SupportsInt | typing.SupportsIndex | None) -> None:
        ...
    @property
    def max_tokens(self) -> int | None:
        ...
    @max_tokens.setter
    def max_tokens(self, arg0: typing.SupportsInt | typing.SupportsIndex | None) -> None:
        ...
    @property
    def min_p(self) -> float:
        ...
    @min_p.setter
    def min_p(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None:
        ...
    @property
    def min_tokens(self) -> int:
        ...
    @min_tokens.setter
    def min_tokens(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def n(self) -> int:
        ...
    @n.setter
    def n(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def presence_penalty(self) -> float:
        ...
    @presence_penalty.setter
    def presence_penalty(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None:
        ...
    @property
    def prompt_logprobs(self) -> int | None:
        ...
    @prompt_logprobs.setter
    def prompt_logprobs(self, arg0: typing.SupportsInt | typing.SupportsIndex | None) -> None:
        ...
    @property
    def repetition_penalty(self) -> float:
        ...
    @repetition_penalty.setter
    def repetition_penalty(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None:
        ...
    @property
    def seed(self) -> int | None:
        ...
    @seed.setter
    def seed(self, arg0: typing.SupportsInt | typing.SupportsIndex | None) -> None:
        ...
    @property
    def stop_token_ids(self) -> list[int]:
        ...
    @stop_token_ids.setter
    def stop_token_ids(self, arg0: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> None:
        ...
    @property
    def temperature(self) -> float:
        ...
    @temperature.setter
    def temperature(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None:
        ...
    @property
    def top_k(self) -> int:
        ...
    @top_k.setter
    def top_k(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def top_p(self) -> float:
        ...
    @top_p.setter
    def top_p(self, arg0: typing.SupportsFloat | typing.SupportsIndex) -> None:
        ...
class EngineOptions:
    """
    See tiny_vllm.EngineConfig, which holds the defaults.
    """
    cpu_isa: str
    device: str
    dtype: str
    dummy_weights: bool
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    enforce_eager: bool
    profile: bool
    record_events: bool
    scheduler: str
    scheduling_policy: str
    def __init__(self) -> None:
        ...
    @property
    def block_size(self) -> int:
        ...
    @block_size.setter
    def block_size(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def eos_token_ids(self) -> list[int]:
        ...
    @eos_token_ids.setter
    def eos_token_ids(self, arg0: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex]) -> None:
        ...
    @property
    def kv_cache_memory_bytes(self) -> int:
        ...
    @kv_cache_memory_bytes.setter
    def kv_cache_memory_bytes(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def max_model_len(self) -> int:
        ...
    @max_model_len.setter
    def max_model_len(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def max_num_batched_tokens(self) -> int:
        ...
    @max_num_batched_tokens.setter
    def max_num_batched_tokens(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def max_num_seqs(self) -> int:
        ...
    @max_num_seqs.setter
    def max_num_seqs(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def memory_utilization(self) -> float | None:
        ...
    @memory_utilization.setter
    def memory_utilization(self, arg0: typing.SupportsFloat | typing.SupportsIndex | None) -> None:
        ...
    @property
    def num_threads(self) -> int:
        ...
    @num_threads.setter
    def num_threads(self, arg1: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
    @property
    def seed(self) -> int:
        ...
    @seed.setter
    def seed(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> None:
        ...
class TokenLogprob:
    @property
    def logprob(self) -> float:
        ...
    @property
    def rank(self) -> int:
        ...
    @property
    def token(self) -> int:
        ...
class StepOutput:
    """
    What a step has to say about one sequence.
    """
    @property
    def error(self) -> str:
        ...
    @property
    def finish_reason(self) -> str:
        ...
    @property
    def index(self) -> int:
        ...
    @property
    def logprobs(self) -> list[TokenLogprob]:
        ...
    @property
    def num_cached_tokens(self) -> int:
        ...
    @property
    def prompt_logprobs(self) -> list[list[TokenLogprob]]:
        ...
    @property
    def request_id(self) -> str:
        ...
    @property
    def stop_token(self) -> int | None:
        ...
    @property
    def time(self) -> float:
        ...
    @property
    def token(self) -> int:
        ...
class KernelRecord:
    """
    One kernel that ran on a GPU: cpp/backend/kernel_record.h.
    """
    @property
    def bytes(self) -> int:
        ...
    @property
    def duration_us(self) -> float:
        ...
    @property
    def flops(self) -> int:
        ...
    @property
    def name(self) -> str:
        ...
    @property
    def start_us(self) -> float:
        ...
    @property
    def step(self) -> int:
        ...
    @property
    def tokens(self) -> int:
        ...
class Engine:
    """
    See tiny_vllm.Engine. Not for two callers at once.
    """
    @staticmethod
    def make_ready(moved: dict, ready: list, request: typing.Any, output: typing.Any, count: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        Puts the output into `ready` and takes its request out of `moved`, if the request is still there and has received `count` words, which is what the output was made of.
        """
    def __init__(self, config_json: str, source: str, folder: str, options: EngineOptions, progress: typing.Any = None) -> None:
        ...
    def abort_request(self, requests: dict, watched: dict, moved: dict, ready: list, request_id: str) -> bool:
        ...
    def add_request(self, requests: dict, watched: dict, moved: dict, ready: list, request: typing.Any, prompt_token_ids: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex], params: SamplingParams, priority: typing.SupportsInt | typing.SupportsIndex = 0, allowed: bytes = b'') -> None:
        ...
    def allow_tokens(self, requests: dict, request: typing.Any, index: typing.SupportsInt | typing.SupportsIndex, num_output_tokens: typing.SupportsInt | typing.SupportsIndex, allowed: bytes) -> bool:
        """
        Says which tokens may come next in a sequence of a guided request. False if it is not that token's turn.
        """
    def check_invariants(self) -> None:
        ...
    def events(self) -> typing.Any:
        """
        What has happened up to now, as lists: see tiny_vllm.Engine.events().
        """
    def has_unfinished_requests(self) -> bool:
        ...
    def info(self) -> dict:
        ...
    def metrics(self) -> dict:
        ...
    def step(self, requests: dict, watched: dict, moved: dict) -> None:
        """
        Runs one step. Each StepOutput goes to its request in `requests`; those without owner go into `moved`.
        """
    def stop_sequence(self, requests: dict, watched: dict, request: typing.Any, index: typing.SupportsInt | typing.SupportsIndex, failed: bool = False) -> bool:
        """
        Ends one sequence, because its text is complete, or because it cannot go on. False if it has ended already.
        """
    def take_profile(self) -> list[KernelRecord]:
        """
        The kernels that ran since the last call, in order; with EngineOptions.profile, else none.
        """
def available_isas() -> list[str]:
    """
    The CPU instruction sets that this machine and build can run, best first.
    """
def build_info() -> dict[str, typing.Any]:
    """
    How this binary was made: version, compiler, flags, build_type, target, instruction_sets (of the CPU kernels compiled in), cuda, cuda_reason, cuda_version, cuda_architectures.
    """
def cuda_devices() -> tuple[list[CudaDevice], str]:
    """
    The GPUs, and one sentence that says why there are none ("" when there are). The first call starts CUDA.
    """
def measure_read_bandwidth(num_threads: typing.SupportsInt | typing.SupportsIndex = 0, bytes: typing.SupportsInt | typing.SupportsIndex = 536870912) -> float:
    """
    GB/s that this many threads read memory with: the ceiling of decoding. 0: all CPUs of this process.
    """
def parse_config(json_text: str, source: str = 'config.json') -> ModelConfig:
    """
    Parses and checks the text of a config.json; source names it in messages. Raises ModelLoadError.
    """
def sample(ops: Ops, logits: DeviceArray, rows: collections.abc.Sequence[SampleRow]) -> list[int]:
    """
    A token for each row of logits (n, V), chosen by the device if it can, by Sampler otherwise.
    """
def supported_model_types() -> list[str]:
    """
    The values of model_type that parse_config accepts.
    """
