{{- define "gateway.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gateway.labels" -}}
{{ include "gateway.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "gateway.metadata" -}}
name: {{ .Release.Name }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "gateway.labels" . | nindent 2 }}
{{- end }}

{{- define "gateway.valkey.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}-valkey
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "gateway.valkey.metadata" -}}
name: {{ .Release.Name }}-valkey
namespace: {{ .Release.Namespace }}
labels:
  {{- include "gateway.valkey.selector" . | nindent 2 }}
{{- end }}

{{- define "gateway.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{- define "gateway.secret" -}}
{{- if .Values.secret.existing }}{{ .Values.secret.existing }}{{ else if .Values.secret.values }}{{ .Release.Name }}{{ end }}
{{- end }}

{{- /* Sequences in flight and waiting, per slot of the engines. */ -}}
{{- define "gateway.demand" -}}
{{- $of := printf "{namespace=%q,service=%q}" .Release.Namespace (printf "%s-metrics" .Release.Name) -}}
(sum(gateway_backend_in_flight{{ $of }}) + (sum(gateway_queued_requests{{ $of }}) or vector(0))) / clamp_min(sum(max by (backend) (gateway_backend_in_flight_limit{{ $of }})), 1)
{{- end }}

{{- /* How fast replicas of the engines come and go. */ -}}
{{- define "gateway.behavior" -}}
scaleUp:
  stabilizationWindowSeconds: 60
  selectPolicy: Max
  policies:
    - {type: Percent, value: 100, periodSeconds: 120}
    - {type: Pods, value: 2, periodSeconds: 120}
scaleDown:
  stabilizationWindowSeconds: 900
  policies:
    - {type: Pods, value: 1, periodSeconds: 300}
{{- end }}
